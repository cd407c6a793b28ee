package tier

func runNode(string) error { return nil }
