"""Sources of conversations: turns data sets, files and rows into `Conversation`."""
