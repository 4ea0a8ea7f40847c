"""The ProTrain strategy for Lightning: profile the model, search for a plan, place the model, and run."""
