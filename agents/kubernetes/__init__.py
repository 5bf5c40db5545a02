"""The Node object of this machine in Kubernetes: read for drains and cordons, written when this cluster isolates the
node."""
