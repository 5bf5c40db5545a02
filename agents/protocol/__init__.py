"""The protocol that the processes of a node share: agent, fork server and workers use it; it imports none of them."""
