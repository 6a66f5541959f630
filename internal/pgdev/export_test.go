package pgdev

var UnpackPackage = unpackPackage

// LoseLock leaves the server running, as the owner's death together with the watchdog's would.
func (s *Server) LoseLock() error {
	err := s.lock.Close()
	s.lock = nil
	return err
}
