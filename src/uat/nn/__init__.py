"""Architecture: what methods are built of. No decisions about learning."""
