"""Daily bars of stock markets, from files, downloads or a generator, aligned into panels and turned into features."""
