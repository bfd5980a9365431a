"""`lb.generate` and `lb.enable`: kept caches, and decoding steps that are recorded or compiled."""
