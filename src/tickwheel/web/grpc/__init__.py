"""The gRPC API: the verbs, checks and limits of the HTTP API, as `tickwheel.v1.TaskService`."""
