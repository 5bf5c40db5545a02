"""What people write, read strictly: task files, the configuration."""
