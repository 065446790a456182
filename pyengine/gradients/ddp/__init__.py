"""DDP support: a communication hook, and DDP models whose gradients the engine owns."""
