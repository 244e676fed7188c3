"""What a run leaves behind: its folder, metrics, checkpoints, pictures and the machine it ran on."""
