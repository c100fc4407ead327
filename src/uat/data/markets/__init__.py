"""Daily bars of stock markets: files, downloads and a generator become panels, panels become features."""
