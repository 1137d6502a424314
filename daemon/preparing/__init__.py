"""`headway data prepare`: documents in, a folder of token shards out."""
