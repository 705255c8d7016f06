"""Published weights of decoder-only Transformers: folders of Hugging Face, read and written."""
