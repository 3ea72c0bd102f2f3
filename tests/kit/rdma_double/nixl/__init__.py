"""A fabric that is none: what the package uses of NIXL, over the memory of processes of this machine."""
