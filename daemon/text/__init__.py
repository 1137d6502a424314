"""Documents become token shards: sources, tokenizers, chats, `headway data prepare`."""
