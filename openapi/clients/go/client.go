package redlock

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/redlock-gateway/redlock-gateway/openapi/clients/go/api"
)

const (
	// The first and the longest pause between two rounds over all gateways.
	firstPause   = 50 * time.Millisecond
	longestPause = 2 * time.Second
	// After this time without a connection the next gateway is asked.
	connectLimit = 2 * time.Second
	// How long an idle connection is kept. An extension that reuses it needs no name server. A
	// gateway keeps it for 75 s.
	idleLimit = 70 * time.Second
	// With less time no answer can be expected, and earlier answers say more than a missing one.
	shortestTry = 50 * time.Millisecond
	// The largest answer in bytes. Those of a gateway are far smaller.
	maxBytes = 1 << 20
	// The codes of answers that are no gateway's.
	fromProxy   = "proxy"
	notAGateway = "not_a_gateway"
	// How long a log line may delay the return of WithLock.
	logLimit = 500 * time.Millisecond
)

// Config names the gateways and the API key.
type Config struct {
	// URLs of one or several gateways over the same masters: "http://127.0.0.1:8080". A path is
	// kept.
	URLs []string
	// Key is the API key; empty for gateways without keys. It is a secret, so JSON leaves it out.
	Key string `json:"-"`
	// HTTPClient is for TLS settings and the like; redirects are never followed. Its Timeout must
	// be 0 or longer than a wait. Nil is a client without a proxy from the environment, and without
	// HTTP/2.
	HTTPClient *http.Client
	// Turn is the longest wait of one request. Set it below the limits of proxies in front of the
	// gateways. 0 is 20 s, or 5 s with several gateways, so that a hanging one cannot use up the
	// time.
	Turn time.Duration
	// Logger gets losses, locks that were not released, and lost places in line. Nil logs nothing.
	Logger *slog.Logger
}

// Client asks one or several gateways over the same masters. Several goroutines may use it.
type Client struct {
	gateways []*api.Client
	turn     time.Duration
	log      *slog.Logger
	// Closes idle connections after a try that was not answered in time.
	hangUp func()
	// The index of the gateway that answered last.
	current  atomic.Int64
	together together
}

// New makes a client. It connects to nothing yet. The error is a [*SetupError] that names the wrong
// argument.
func New(config Config) (*Client, error) {
	if len(config.URLs) == 0 {
		return nil, &SetupError{"no URL of a gateway was given, such as http://127.0.0.1:8080"}
	}
	client := &Client{turn: config.Turn, log: config.Logger, hangUp: func() {}}
	if client.turn <= 0 {
		client.turn = 20 * time.Second
		if len(config.URLs) > 1 {
			client.turn = 5 * time.Second
		}
	}
	if client.log == nil {
		client.log = slog.New(slog.DiscardHandler)
	}
	var doer http.Client
	if config.HTTPClient != nil {
		doer = *config.HTTPClient
	} else {
		transport := newTransport()
		doer.Transport = transport
		client.hangUp = transport.CloseIdleConnections
	}
	// A redirect would send the token to another host.
	doer.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
	key := strings.TrimSpace(config.Key)
	if strings.ContainsFunc(key, func(char rune) bool { return char <= ' ' || char > '~' }) {
		return nil, &SetupError{"the API key has characters that a header cannot contain"}
	}
	for _, text := range config.URLs {
		if err := checkURL(text); err != nil {
			return nil, err
		}
		gateway, err := api.NewClient(text, api.WithHTTPClient(&doer), api.WithRequestEditorFn(identify(key)))
		if err != nil {
			return nil, &SetupError{err.Error()}
		}
		client.gateways = append(client.gateways, gateway)
	}
	return client, nil
}

func newTransport() *http.Transport {
	transport := http.DefaultTransport.(*http.Transport).Clone()
	// A proxy from the environment would be a hidden dependency of each lock.
	transport.Proxy = nil
	transport.DialContext = (&net.Dialer{Timeout: connectLimit, KeepAlive: 15 * time.Second}).DialContext
	// HTTP/2 would send each repetition over the one connection that hangs.
	transport.ForceAttemptHTTP2 = false
	transport.Protocols = new(http.Protocols)
	transport.Protocols.SetHTTP1(true)
	transport.MaxIdleConnsPerHost = 32
	transport.IdleConnTimeout = idleLimit
	return transport
}

func identify(key string) api.RequestEditorFn {
	return func(_ context.Context, request *http.Request) error {
		request.Header.Set("User-Agent", "redlock-gateway-go/0.1.0")
		// The transport could repeat an unanswered POST by itself. A refusal of the second one would
		// then hide that the first one may have been granted.
		request.GetBody = nil
		if key != "" {
			request.Header.Set("Authorization", "Bearer "+key)
		}
		return nil
	}
}

func checkURL(text string) error {
	// Text before an @ may be a password, and the parser's error contains it too.
	refused := func(why string) error {
		return &SetupError{fmt.Sprintf("%q is not a URL of a gateway: %s", text[strings.LastIndex(text, "@")+1:], why)}
	}
	parsed, err := url.Parse(text)
	switch {
	case err != nil:
		return refused("it cannot be parsed")
	case parsed.Scheme != "http" && parsed.Scheme != "https" || parsed.Host == "":
		return refused("it has to begin with http:// or https://, and name a host")
	case parsed.User != nil || parsed.RawQuery != "" || parsed.ForceQuery || parsed.Fragment != "":
		return refused("only scheme, host, port and path are allowed; an API key goes into Config.Key")
	}
	return nil
}

// question is one request. A gateway may execute it twice, so it must be idempotent.
type question struct {
	// The lock or set that errors name; empty if the request is about none in particular.
	name string
	send func(ctx context.Context, gateway *api.Client) (*http.Response, error)
	// Reads the body of the answer. Nil if the answer has none.
	read   func(body []byte) error
	until  moment
	oneTry time.Duration
	// After this moment no further round is asked if no gateway has accepted a connection so far. 0
	// is until.
	hope moment
	// Keeps several requests at one gateway; may be nil.
	route *route
	// Gets each failure; may be nil.
	heard func(what string)
	// Becomes true if a gateway may have executed a failed request; may be nil.
	unsettled *bool
}

// route is the gateway that an acquisition asks: it stays there while that gateway answers.
type route struct {
	at int64
}

func (c *Client) newRoute() *route {
	return &route{at: c.current.Load()}
}

// ask asks one gateway after the other until one answers, with pauses. It returns when the answered
// request was sent.
func (c *Client) ask(ctx context.Context, q question) (moment, error) {
	pause := firstPause
	route := q.route
	if route == nil {
		route = c.newRoute()
	}
	isAnybodyThere := false
	for {
		unavailable := &UnavailableError{Name: q.name}
		soonest := time.Duration(-1)
		for range c.gateways {
			limit := min(q.oneTry, q.until.left())
			if limit < shortestTry && len(unavailable.What) > 0 {
				break
			}
			at := route.at
			sent := now()
			failure := c.try(ctx, c.gateways[at], q, max(limit, shortestTry))
			if failure == nil {
				return sent, nil
			}
			isAnybodyThere = isAnybodyThere || !failure.isUnreachable
			if q.unsettled != nil && !failure.isRefusal() && !failure.isUnreachable {
				*q.unsettled = true
			}
			if ctx.Err() != nil {
				return sent, ended(ctx)
			}
			asked, again := failure.pause()
			if !again {
				return sent, &RefusedError{Name: cmp.Or(failure.name, q.name), Problem: *failure.problem}
			}
			if q.heard != nil {
				q.heard(failure.String())
			}
			if soonest < 0 || asked < soonest {
				soonest = asked
			}
			unavailable.What = append(unavailable.What, failure.String())
			if failure.problem != nil {
				unavailable.Last = failure.problem
			}
			route.at = (at + 1) % int64(len(c.gateways))
			// Another request may have moved on to the next gateway meanwhile.
			c.current.CompareAndSwap(at, route.at)
		}
		rest := max(time.Duration(float64(pause)*(0.5+rand.Float64())), soonest)
		if !isAnybodyThere && q.hope != 0 {
			rest = min(rest, q.hope.left())
		}
		if rest == 0 || rest+shortestTry >= q.until.left() {
			return 0, unavailable
		}
		if !sleep(ctx, rest) {
			return 0, ended(ctx)
		}
		pause = min(2*pause, longestPause)
	}
}

// try asks one gateway, and waits for its answer up to limit; nil on success.
func (c *Client) try(ctx context.Context, gateway *api.Client, q question, limit time.Duration) *failure {
	unclear := func(format string, values ...any) *failure {
		return &failure{unclear: gateway.Server + " " + fmt.Sprintf(format, values...)}
	}
	limited, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	response, err := q.send(limited, gateway)
	var body []byte
	if err == nil {
		body, err = io.ReadAll(io.LimitReader(response.Body, maxBytes))
		response.Body.Close()
	}
	if err != nil {
		if limited.Err() != nil && ctx.Err() == nil {
			// Behind a cut network every idle connection is dead, and each would cost another try.
			c.hangUp()
			return unclear("did not answer within %.1f s", limit.Seconds())
		}
		var inner *url.Error
		if errors.As(err, &inner) {
			err = inner.Err
		}
		failed := unclear("failed: %v", err)
		var dial *net.OpError
		failed.isUnreachable = errors.As(err, &dial) && dial.Op == "dial"
		return failed
	}
	if response.StatusCode/100 != 2 {
		return refusal(gateway.Server, response, body)
	}
	if q.read == nil {
		if response.StatusCode != http.StatusNoContent {
			return unclear("answered %s, as no gateway does", response.Status)
		}
		return nil
	}
	if err := q.read(body); err != nil {
		var some *someUndecided
		if errors.As(err, &some) {
			return &failure{name: some.name, problem: some.problem}
		}
		return unclear("answered %s, but not as a gateway does: %v", response.Status, err)
	}
	return nil
}

// readLease returns a function that reads a granted or extended lock.
func readLease(lease *api.Lease) func(body []byte) error {
	return func(body []byte) error {
		*lease = api.Lease{}
		if err := json.Unmarshal(body, lease); err != nil {
			return err
		}
		if !isToken(lease.Token) {
			return errors.New("its token is malformed")
		}
		return nil
	}
}

// failure is a failed request.
type failure struct {
	// The lock of a set that the problem is about; empty if it is about the whole request.
	name string
	// Nil if it is unknown whether the request was executed: no answer, or none of a gateway.
	problem *Problem
	unclear string
	// There was no connection, so no request was sent.
	isUnreachable bool
}

func refusal(server string, response *http.Response, body []byte) *failure {
	var parsed api.Problem
	if json.Unmarshal(body, &parsed) == nil && parsed.Code != "" {
		return &failure{problem: &Problem{
			Status:     response.StatusCode,
			Code:       string(parsed.Code),
			Detail:     parsed.Detail,
			RequestID:  valueOf(parsed.RequestID),
			Holder:     valueOf(parsed.Holder),
			ExpiresIn:  milliseconds(valueOf(parsed.ExpiresInMs)),
			RetryAfter: milliseconds(valueOf(parsed.RetryAfterMs)),
			AcquiredAt: valueOf(parsed.AcquiredAt),
			Holders:    slotHolders(parsed.Holders),
			Held:       heldLocks(parsed.Held),

			QueuePosition:     int(valueOf(parsed.QueuePosition)),
			QueuePlaceExpires: milliseconds(int64(valueOf(parsed.QueuePlaceExpiresMs))),
		}}
	}
	// A proxy's own page. Some proxies send Retry-After.
	problem := &Problem{
		Status: response.StatusCode,
		Code:   notAGateway,
		Detail: fmt.Sprintf("%s answered %s, but not as a gateway does", server, response.Status),
	}
	if problem.mayPass() {
		seconds, err := strconv.Atoi(response.Header.Get("Retry-After"))
		if err != nil {
			return &failure{unclear: problem.Detail}
		}
		problem.Code = fromProxy
		problem.RetryAfter = milliseconds(int64(seconds) * 1000)
	}
	return &failure{problem: problem}
}

// mayPass reports whether a repeated request may succeed a little later.
func (p *Problem) mayPass() bool {
	switch p.Status {
	case http.StatusRequestTimeout, http.StatusTooManyRequests,
		http.StatusBadGateway, http.StatusServiceUnavailable, http.StatusGatewayTimeout:
		return true
	}
	return false
}

// pause returns how long to wait before the request is repeated; false if it would be refused
// again.
func (f *failure) pause() (time.Duration, bool) {
	switch {
	case f.problem == nil:
		return 0, true
	case f.problem.mayPass():
		return f.problem.RetryAfter, true
	default:
		// The next gateway may not have this one's defect.
		return 0, f.problem.Status == http.StatusInternalServerError
	}
}

// isRefusal reports whether a gateway refused the request, so that it changed nothing. A page of a
// proxy leaves that open.
func (f *failure) isRefusal() bool {
	p := f.problem
	return p != nil && p.Status/100 == 4 && p.Code != fromProxy && p.Code != notAGateway
}

func (f *failure) String() string {
	if f.problem != nil {
		return about(f.name, f.problem.String())
	}
	return f.unclear
}

// warn writes a log line in a goroutine of its own, because nobody may read the log. The channel is
// closed when the line is written.
func (c *Client) warn(what, name string, err error) <-chan struct{} {
	written := make(chan struct{})
	go func() {
		defer close(written)
		if err == nil {
			c.log.Warn(what, "name", name)
		} else {
			c.log.Warn(what, "name", name, "error", err)
		}
	}()
	return written
}

// ended returns why a context ended, as an error that wraps ctx.Err() for errors.Is.
func ended(ctx context.Context) error {
	if cause := context.Cause(ctx); !errors.Is(cause, ctx.Err()) {
		return fmt.Errorf("%w: %w", ctx.Err(), cause)
	}
	return ctx.Err()
}

func valueOf[T any](pointer *T) T {
	var value T
	if pointer != nil {
		value = *pointer
	}
	return value
}

// milliseconds converts a number from an answer; it allows no negative value and no overflow.
func milliseconds(count int64) time.Duration {
	const most = int64(24 * time.Hour / time.Millisecond)
	return time.Duration(min(max(count, 0), most)) * time.Millisecond
}

func isToken(text string) bool {
	return text != "" && !strings.ContainsFunc(text, func(char rune) bool {
		return (char < '0' || char > '9') && (char < 'a' || char > 'z') && (char < 'A' || char > 'Z') && char != '.' && char != '-'
	})
}
