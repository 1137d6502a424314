"""Start from a model: a folder or URL in Hugging Face's layout, read by range."""
