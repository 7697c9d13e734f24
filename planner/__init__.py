"""Which layout to choose: what each holds, sends and takes, by formula. Torch-free."""
