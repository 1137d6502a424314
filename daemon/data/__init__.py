"""Turns text into tokens: its sources, its tokenizers, its chats."""
