"""What the processes of a node share: agent, fork server and workers speak it; it imports none of them."""
