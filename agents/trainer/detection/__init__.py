"""What a worker detects in its own training: iterations that are late or slow, loss spikes, corrupt parameters."""
