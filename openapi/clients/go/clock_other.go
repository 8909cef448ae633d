//go:build !linux

package redlock

func now() moment {
	return monotonic()
}
