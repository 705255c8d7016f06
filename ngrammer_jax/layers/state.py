"""The state carried from segment to segment: arrays by name, passed in and returned.

The first axis of each array is the batch. Shapes and dtypes do not change from segment to segment.
"""

from typing import Any

State = dict[str, Any]  # of one layer: its arrays by name
Memory = dict[str, Any]  # of a block or a model: the states of all its layers by name
