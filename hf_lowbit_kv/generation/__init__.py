"""`lb.generate` and `lb.enable`: caches that are kept, and decoding steps that are recorded or compiled."""
