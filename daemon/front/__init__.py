"""One port for everything that comes to a node: connections are passed on to the daemon or a worker, unread."""
