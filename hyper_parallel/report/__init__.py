"""What a person looks at: memory figures, tables and pictures."""
