"""How the pair of `specdec_mlx.lab` was made."""
