"""`headway doctor`: what is wrong with a machine, with etcd and with the ways between nodes, and what to do next."""
