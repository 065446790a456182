"""Who owns gradients, where they lie, how they are summed and sent."""
