"""DDP support: a communication hook, and a DDP whose gradients the engine owns."""
