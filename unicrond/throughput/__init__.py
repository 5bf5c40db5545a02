"""A model of the training speed of a task with n workers, for tasks that bring no measured profile."""
