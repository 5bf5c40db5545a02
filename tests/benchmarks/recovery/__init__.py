"""What a SIGKILL in mid-iteration costs: unicrond beside torchrun and torchft, the same GPT (`make bench-recovery`)."""
