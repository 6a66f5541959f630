# Runs a PostgreSQL server and stops it when nobody uses it any more.
#
# $1 postgres, $2 data directory, $3 how often, a second apart, file descriptor 3 must be found closed at the other end,
# $4 the named pipe behind it or "", $5 a folder to remove when the server was stopped from here or "".
#
# The users hold the writing end of file descriptor 3. The kernel closes it for them when they end, kill -9 included.
# One who comes later to a named pipe writes a line, so that his coming is not taken for the end of another.

postgres=$1 data=$2 limit=$3 pipe=$4 remove=$5

"$postgres" -D "$data" </dev/null 3<&- &
server=$!

until_unused() {
	idle=0
	while [ "$idle" -lt "$1" ]; do
		if read -r _ <&3; then
			idle=0
		else
			idle=$((idle + 1))
			[ "$idle" -lt "$1" ] && sleep 1 3<&-
		fi
	done
}

(
	until_unused "$limit"
	if [ -n "$pipe" ]; then
		# From here on nobody can come; one who came in the last moment is still waited for.
		mv "$pipe" "$pipe.closed"
		until_unused 1
	fi
	sleep 60 3<&- &
	timer=$!
	trap 'kill "$timer"; exit 0' TERM
	kill -INT "$server"
	wait "$timer"
	kill -QUIT "$server"
	wait
) &
watcher=$!
exec 3<&-

wait "$server"
code=$?
kill "$watcher" 2>/dev/null
# The watcher ends with 0 when it was the one that stopped the server. What a crash leaves is of use to an owner who
# starts the server again, but not to those who share one.
if wait "$watcher" 2>/dev/null || { [ -n "$pipe" ] && [ "$code" -gt 128 ]; }; then
	[ -n "$remove" ] && rm -rf "$remove"
fi
exit "$code"
