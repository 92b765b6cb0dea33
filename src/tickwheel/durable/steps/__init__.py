"""The steps: the life of a task, from submit to its end, and the node that runs them."""
