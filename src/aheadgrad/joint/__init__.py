"""What a recording is lowered to: entrances, exits, components and gradients, as values."""
