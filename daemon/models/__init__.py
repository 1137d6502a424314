"""A model's folder or URL in Hugging Face's layout: the start of a job, and its result."""
