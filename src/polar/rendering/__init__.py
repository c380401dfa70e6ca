"""Messages to token ids and back: chat templates and tokenizers."""
