package redlock

import (
	"syscall"
	"unsafe"
)

// CLOCK_BOOTTIME has the same number on every architecture.
const clockBoottime = 7

func now() moment {
	var time syscall.Timespec
	_, _, errno := syscall.RawSyscall(syscall.SYS_CLOCK_GETTIME, clockBoottime, uintptr(unsafe.Pointer(&time)), 0)
	if errno != 0 {
		// A sandbox that refuses the call refuses it each time, so the two clocks are never mixed.
		return monotonic()
	}
	return moment(time.Nano())
}
