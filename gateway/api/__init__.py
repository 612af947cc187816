"""HTTP: sessions, groups, experience, admin and the served schema; `openai` is OpenAI's API."""
