"""The fork server: the process that the node's workers are forked from."""
