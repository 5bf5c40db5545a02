"""The node's own Node object of Kubernetes: read, and written where this cluster isolates the node."""
