"""What a node deletes once a day because nobody uses it any more."""
