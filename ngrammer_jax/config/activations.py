"""Names of the activations of feed-forward layers and of memories, see `layers.activations`."""

NAMES = ('gelu', 'gelu_erf', 'relu', 'silu', 'squared_relu', 'softmax')
