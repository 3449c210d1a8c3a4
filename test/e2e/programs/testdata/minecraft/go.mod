module minecraft

go 1.26.0

require (
	github.com/Tnze/go-mc v1.20.2
	github.com/google/uuid v1.6.0
)
