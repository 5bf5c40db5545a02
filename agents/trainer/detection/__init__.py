"""What a worker observes of its own training: late, slow, spiking or corrupt."""
