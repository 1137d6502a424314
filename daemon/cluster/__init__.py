"""What etcd holds and how it is reached: records, keys, the client, transactions, watches."""
