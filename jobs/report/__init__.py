"""`rlhf report`: from run directories to one HTML file, which loads nothing from the network. Needs no Ray."""
