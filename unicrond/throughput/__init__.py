"""What a task of n workers delivers: a model of training speed, for tasks that bring no measured profile."""
