"""Replication: shards on their way to other hosts and from them."""
