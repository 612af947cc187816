"""The repack loop, and the mover that carries its plans out."""
