"""Text to rows of token ids: tokenizer, documents, prepared folder, batches. Import the names from the files."""
