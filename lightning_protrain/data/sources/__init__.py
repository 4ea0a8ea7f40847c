"""Where conversations come from: data sets, files and rows become `Conversation`."""
