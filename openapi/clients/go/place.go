package redlock

import (
	"fmt"
	"log/slog"
	"os"
	"os/user"
	"path/filepath"
	"strings"
	"time"
	"unicode"
)

// The longest label that a gateway accepts, in characters.
const longestLabel = 255

// Waiting is what is known while an acquisition waits. What the gateway does not say is the zero
// value.
type Waiting struct {
	// Name is the lock's name. For a set it has all names, separated by commas.
	Name string
	// Position is the place in this gateway's line for the lock; 1 is next. A set is in the line of the
	// lock that refused it, and its place is not kept.
	Position int
	// Holder is the holder's label.
	Holder string
	// AcquiredAt is since when the holder has the lock.
	AcquiredAt time.Time
	// Gateway is the URL of the gateway that keeps the place.
	Gateway string
}

// place is the place of an acquisition in the line for its lock. One goroutine uses it.
type place struct {
	client *Client
	name   string
	isKept bool
	last   Waiting
}

// refused notes the end of a turn: somebody else holds the lock.
func (p *place) refused(gateway string, problem Problem) {
	before, wasKept := p.last, p.isKept
	p.isKept = problem.QueuePlaceExpires > 0
	p.last = Waiting{
		Name: p.name, Position: problem.QueuePosition, Holder: problem.Holder, AcquiredAt: problem.AcquiredAt,
		Gateway: gateway,
	}
	// A set has no place that is kept between its requests.
	if before.Position == 0 || !wasKept {
		return
	}
	where := "waiting"
	if p.last.Position > 0 {
		where = ordinal(p.last.Position) + " in line"
	}
	switch {
	case before.Gateway != gateway:
		p.client.warn(fmt.Sprintf("place in line lost: %s does not answer; now %s at %s", before.Gateway, where, gateway), p.name, nil)
	case p.last.Position > before.Position:
		p.client.warn(fmt.Sprintf("place in line lost; now %s at %s", where, gateway), p.name, nil)
	}
}

func ordinal(number int) string {
	ending := "th"
	if number%100 < 11 || number%100 > 13 {
		switch number % 10 {
		case 1:
			ending = "st"
		case 2:
			ending = "nd"
		case 3:
			ending = "rd"
		}
	}
	return fmt.Sprint(number, ending)
}

// defaultOwner returns "user@host:pid program", a label for people.
func defaultOwner() string {
	name := "unknown"
	if current, err := user.Current(); err == nil {
		name = current.Username
	}
	host, err := os.Hostname()
	if err != nil {
		host = "unknown"
	}
	label := fmt.Sprintf("%s@%s:%d %s", name, host, os.Getpid(), filepath.Base(os.Args[0]))
	// A gateway refuses control characters.
	printable := []rune(strings.Map(func(char rune) rune {
		if unicode.IsPrint(char) {
			return char
		}
		return '?'
	}, label))
	return string(printable[:min(len(printable), longestLabel)])
}

// Format shows the configuration without its key, which is a secret, for every verb.
func (c Config) Format(state fmt.State, _ rune) {
	fmt.Fprintf(state, "Config of %q", c.URLs)
}

// LogValue is what [log/slog] shows of a configuration: its URLs, without the key.
func (c Config) LogValue() slog.Value {
	return slog.GroupValue(slog.Any("urls", c.URLs))
}
