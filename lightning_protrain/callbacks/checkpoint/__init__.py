"""`ProTrainCheckpoint` and its parts: when to save a checkpoint, and how to resume from one."""
